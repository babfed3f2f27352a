"""The storage engine: CommitLog, ConsumeQueue, IndexFile and the tables in `config/`."""
