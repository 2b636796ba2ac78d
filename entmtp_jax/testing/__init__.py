"""Tools for tests and experiments: a tiny model, an independent reference decoder, heads with known behaviour."""
