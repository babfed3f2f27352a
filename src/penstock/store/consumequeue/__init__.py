"""ConsumeQueues: their files, the table of all queues, which are mapped, removal."""
