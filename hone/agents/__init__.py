"""Agents that play episodes of a job, on any machine: `hone.work`, `hone work`."""
