"""`make faults`: jobs on the real stack whose processes, connections and disk are broken at chosen
moments, and what that cost. `__main__.py` runs it."""
