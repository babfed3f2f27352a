"""The servers as a whole: start and stop of a broker and of a NameServer."""
