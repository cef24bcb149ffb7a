"""The engine: the step, the scheduler, running sequences, the runner of the target and the proposer of drafts."""
