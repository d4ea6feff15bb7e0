"""A module that takes as long to import as the drill says, in the place of torch."""

import json
import os
import time

time.sleep(json.loads(os.environ["TOY"]).get("warm_s", 0.0))
