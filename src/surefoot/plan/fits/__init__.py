"""Laws from tables of finished runs. Needs numpy, and scipy where a fit descends."""
