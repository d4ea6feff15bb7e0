"""Which layouts are legal, how long a step takes on each, and the search among them."""
