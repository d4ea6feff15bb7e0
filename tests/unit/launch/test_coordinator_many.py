from __future__ import annotations

from benchmarks.coordinator import measure

from surefoot.coordinate.silence import SilenceLimits


def test_500_nodes_on_10_connections_the_dead_are_seen_and_nobody_else() -> None:
    """How soon is for the benchmark to say; here it is only that they are, and that beats are answered."""
    leases = SilenceLimits(suspect_s=1.8, dead_s=3.0)
    seen = measure(num_nodes=500, num_connections=10, num_deaths=4, measure_s=1.0, leases=leases)
    assert max(seen.death_s) < leases.dead_s + 4.0
    assert seen.num_false_deaths == 0
    assert seen.heard_share > 0.5
