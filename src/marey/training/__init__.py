"""One trainer for all: the run, optimizer, schedule, EMA, checkpoints, receipt, plan."""
