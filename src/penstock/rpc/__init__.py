"""What the broker and the NameServer share: requests, answers, the router, files of tables."""
