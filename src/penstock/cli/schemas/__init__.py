"""The JSON that commands print with `--json`, as msgspec Structs, and its JSON Schema."""
