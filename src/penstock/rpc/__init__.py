"""What broker and NameServer share: requests, answers, the router, table files."""
