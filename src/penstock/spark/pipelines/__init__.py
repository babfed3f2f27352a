"""Ready pipelines on DataFrames: each a Python function, and a name for `penstock pipeline run`."""
