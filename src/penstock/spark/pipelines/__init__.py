"""Ready-made Spark pipelines, for Python and for `penstock pipeline run`."""
