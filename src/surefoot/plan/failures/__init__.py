"""What failures do to a run: rates, save interval, retention, goodput, money; the simulator."""
