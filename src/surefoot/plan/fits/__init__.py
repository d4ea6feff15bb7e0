"""Laws from tables of finished runs. The only part that needs scipy."""
