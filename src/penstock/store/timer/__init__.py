"""The files of timed messages: timer wheel, timer log, slots."""
