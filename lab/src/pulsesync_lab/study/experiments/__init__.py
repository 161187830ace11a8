"""The sweeps of the papers, on the demo's policy and on language models: `pulse study experiment`.

An `Experiment` asks a question and has arms; an `Arm` is all that a training run depends on except its seed. `sweeps`
lists them, `loop` trains in one process (rollouts with rounded, perhaps old weights; learning; a Recorder observes),
`runner` runs arms × seeds, some at a time, and `results` writes the results next to the published figures. Needs the
extra torch; `python -m pulsesync_lab.study.experiments` needs nothing more.
"""
