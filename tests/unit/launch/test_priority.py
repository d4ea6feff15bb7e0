"""A thread that lets others first is last in line by itself: the rest of its process is not."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from surefoot.launch.process import let_others_first


def own_niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_thread_that_asks_is_last_in_line() -> None:
    before = own_niceness()
    with ThreadPoolExecutor(max_workers=1, initializer=let_others_first) as behind:
        assert behind.submit(own_niceness).result() == 19
    with ThreadPoolExecutor(max_workers=1) as other:
        assert (other.submit(own_niceness).result(), own_niceness()) == (before, before)
