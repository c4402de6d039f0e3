"""Programs that drive a trainer: a model is a job with `training.objective` "program", whose
operations come over HTTP in place of a recipe. `services/orchestrator/extensions/tinker/` has the routes.

| file | contents |
|---|---|
| `log.py` | the operations of a model, in its run folder |
| `saved.py` | the checkpoints and snapshots that it saved, until they expire |
| `driving.py` | the run: operations in their order, and again after a trainer's death |
| `sampling.py` | samples of a model's snapshots |
"""
