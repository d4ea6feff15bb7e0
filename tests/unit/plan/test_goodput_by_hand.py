"""The simulator against a second one that plays a single run out, save by save, without arrays or arithmetic on cycles."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev

import pytest

from surefoot.plan.failures.scenario import GRADES, Scenario, Tier, interval_of
from surefoot.plan.failures.simulation import CLASSES, simulate

DAY_S = 86_400.0


class OneRun:
    """Walks from event to event. `saves` are (work that it holds, tier, when whole); those of a tier that a fault takes are dropped."""

    def __init__(self, scenario: Scenario, chance: random.Random) -> None:
        self.scenario = scenario
        self.chance = chance
        self.spent = dict.fromkeys(CLASSES, 0.0)
        self.now = self.work = 0.0
        self.number = 0
        self.saves = [(0.0, tier, 0.0) for tier in scenario.tiers]
        self.free = [0.0] * (scenario.num_spares or 0)
        self.next_failure = self.drawn()

    def drawn(self) -> float:
        return self.chance.expovariate(1.0 / self.scenario.mtbf_s)

    def play(self) -> Mapping[str, float]:
        while self.now < self.scenario.total_s:
            self.train_until_failure()
            while self.next_failure <= self.now < self.scenario.total_s:
                self.fail()
        return self.spent

    def train_until_failure(self) -> None:
        """Work and save in turn until the next failure or the end."""
        end = min(self.next_failure, self.scenario.total_s)
        while True:
            step = min(interval_of(self.scenario), end - self.now)
            self.spend("productive", step)
            self.work += step
            if self.now >= end:
                return
            self.number += 1
            stall = min(self.scenario.stall_s, end - self.now)
            self.spend("saving", stall)
            if stall < self.scenario.stall_s:
                return
            for tier in self.scenario.tiers:
                if self.number % tier.every == 0:
                    self.saves.append((self.work, tier, self.now + tier.write_s))

    def fail(self) -> None:
        scenario = self.scenario
        grade = self.chance.choices(GRADES, [scenario.shares[one] for one in GRADES])[0]
        failed = self.next_failure
        self.saves = [save for save in self.saves if save[1].survives(grade) and save[2] <= failed]
        held = max((save[0] for save in self.saves), default=0.0)
        fastest = next((tier for tier in scenario.tiers if any(save[1] is tier and save[0] == held for save in self.saves)), None)
        self.spent["productive"] -= self.work - held
        self.spent["lost_work"] += self.work - held
        self.work, self.number = held, round(held / interval_of(scenario))
        self.spend("detecting", scenario.detect_s)
        if grade == "node" and scenario.num_spares is not None:
            self.spend("waiting_for_node", self.wait_for_node())
        self.spend("restarting", scenario.restart_s[grade])
        self.spend("restoring", fastest.restore_s if fastest and held else 0.0)
        self.next_failure = (failed if scenario.clock == "wall" else self.now) + self.drawn()

    def wait_for_node(self) -> float:
        repaired = self.now + self.chance.expovariate(1.0) * self.scenario.repair_s
        self.free = sorted([*self.free, repaired])
        return max(0.0, self.free.pop(0) - self.now)

    def spend(self, name: str, seconds: float) -> None:
        self.spent[name] += min(seconds, max(0.0, self.scenario.total_s - self.now))
        self.now += seconds


PLAIN = Scenario(
    800,
    6 * DAY_S,
    0.01,
    stall_s=15.0,
    interval_s=500.0,
    tiers=(Tier("memory"), Tier("peer", every=2, write_s=40.0, restore_s=5.0), Tier("shared", every=5, write_s=900.0, restore_s=90.0)),
    detect_s=20.0,
    restart_s={"process": 60.0, "node": 400.0, "large_scale": 2500.0},
    num_spares=2,
    repair_s=4 * 3600.0,
)


@cache
def by_hand(name: str) -> tuple[Mapping[str, float], ...]:
    chance = random.Random(7)
    return tuple(OneRun(SCENARIOS[name], chance).play() for _ in range(40))


def far_apart(name: str, other: Scenario) -> list[str]:
    """Classes in which runs of a scenario by hand and draws of `other` differ by more than chance."""
    found = simulate(other, seed=1)
    far = []
    for part in CLASSES:
        shares = [run[part] / other.total_s for run in by_hand(name)]
        error = stdev(shares) / len(shares) ** 0.5
        if abs(found.classes[part].value - fmean(shares)) > 4.0 * error + 1e-6:
            far.append(part)
    return far


SCENARIOS = {
    "plain": PLAIN,
    "productive clock": replace(PLAIN, clock="productive"),
    "no spare": replace(PLAIN, num_spares=0, num_nodes=300),
    "no memory tier": replace(PLAIN, tiers=PLAIN.tiers[1:], stall_s=200.0),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_simulators_agree_on_every_class(name: str) -> None:
    assert far_apart(name, SCENARIOS[name]) == []


def test_a_difference_would_be_seen() -> None:
    written_at_once = tuple(replace(tier, write_s=0.0) for tier in PLAIN.tiers)
    assert "lost_work" in far_apart("plain", replace(PLAIN, tiers=written_at_once))
    assert "waiting_for_node" in far_apart("plain", replace(PLAIN, num_spares=3))
    assert "detecting" in far_apart("plain", replace(PLAIN, clock="productive"))
