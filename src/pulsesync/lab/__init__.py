"""For the study of weight updates: recordings, forecasts, experiments, the demo, charts. No worker needs it."""
