"""POP consumption: checkpoints, acknowledgements, invisible time, revive."""
