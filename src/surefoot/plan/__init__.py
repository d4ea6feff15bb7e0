"""From a budget to a run. `compose.make_plan` puts it together; each folder is a part that can be asked alone.

sizing    FLOPs, laws, frontier, and a decoder of that size
tuning    batch, ramp, learning rate, schedule
fits      laws from tables of finished runs
memory    of a device, term by term
layouts   what is legal, how long a step takes, search, judgement
failures  rates, save interval, retention, goodput, simulation
sweeps    proxy runs for laws of one's own
rerun     the rest of a run, planned from what it measured
textbook  rules of thumb, computed again
"""
