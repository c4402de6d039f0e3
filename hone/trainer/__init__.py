"""`hone.Trainer`: GRPO from a script or notebook. `trainer.py` has it; READ FIRST."""
