"""`surefoot rollback`: have a run go back to an older checkpoint, in place where it is live."""

from __future__ import annotations

from typing import Annotated

import typer

from surefoot.cli.operators import WAIT_S, Json, Reason, Run, Wait, WaitS, live_job


def rollback(
    run: Run,
    to: Annotated[int, typer.Option("--to", metavar="STEP", min=0, help="The checkpoint of this step, or the newest good one before it.")],
    skip: Annotated[
        str, typer.Option("--skip", metavar="A:B", help="Leave out the samples that steps A up to B took, B not among them.")
    ] = "",
    block: Annotated[
        list[str], typer.Option("--block", metavar="DOC", help="Leave out a document, as `data locate` names it. May be given again.")
    ] = [],  # noqa: B006 - never changed
    yes: Annotated[bool, typer.Option("--yes", help="Also to one that is suspect, given up, too old, or far from STEP.")] = False,
    reason: Reason = "",
    json_output: Json = False,
    wait: Wait = True,
    wait_s: WaitS = WAIT_S,
) -> None:
    """Have a run go back. A live one restores in place after its step; for one that has ended the next `surefoot train RUN` begins there.

    The steps after it are compared with what was recorded of them, as far as their samples are the same.

    \b
    Examples:
      surefoot rollback runs/quickstart --to 400 --reason "the loss was odd after that"
      surefoot rollback runs/quickstart --to 400 --skip 412:420 --yes
      surefoot rollback runs/quickstart --to 400 --block 3f2a9c01d4 --json
    """
    from surefoot.cli.operators_rollback import GoBack, go_back_live, wish_to_go_back

    wanted = GoBack(run, to=to, skip=skip, documents=tuple(block), confirmed=yes, reason=reason)
    job = live_job(run)
    told = wish_to_go_back(wanted) if job is None else go_back_live(wanted, job=job, wait=wait, wait_s=wait_s)
    told.say(json_output=json_output)
