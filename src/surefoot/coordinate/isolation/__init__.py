"""Taking a node out of service: who decides (`policy`, pure), who does it (`slurm`, `kubernetes`, `denylist`), and what a person types."""

from surefoot.coordinate.isolation.records import Isolation, Isolator, NodeStanding, Wish

__all__ = ["Isolation", "Isolator", "NodeStanding", "Wish"]
