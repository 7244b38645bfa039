"""How the plugin takes hold of Megatron: symbols looked up by name, functions put around others, what arguments say.

It knows nothing of groups and outer steps. What is named here and missing in a release is refused at start-up, never in the
middle of a run.
"""
