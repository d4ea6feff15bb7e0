"""How a model is trained: batch, ramp, learning rate, schedule, by published laws."""
