"""For people who study weight updates: recordings and forecasts, experiments, the demo, charts. No worker needs it."""
