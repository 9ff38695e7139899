"""What tries to break the promises: crash points, outside faults, a workload that tells the truth, schedules from a seed."""
