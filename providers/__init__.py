"""Custom providers: thin adapters from Pulumi's dynamic resources to spark_core, one resource per file.

Module path and class name of every provider are what state stores. They are a wire format: never move one without
leaving a module behind that still has the name.
"""
