"""The version of Penstock."""

VERSION = "0.1.0"
