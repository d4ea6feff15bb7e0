"""Which model a budget buys: FLOPs, laws, frontier, shapes."""
