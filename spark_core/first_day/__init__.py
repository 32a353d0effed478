"""The first day of a pair of Sparks: what is there already, and the settings that fit it."""
