"""Recipe files of the tools that owners of Sparks use already, sparkrun and eugr's spark-vllm-docker, read as they are.

Each key of a file and each word of its command ends up in an account: taken as a setting, changed, left out and why, or
not understood. Nothing of a file is run, and no value of what is left out is shown, since it may be a secret.
"""

from spark_core.foreign_recipes.account import Account, Entry, Verdict
from spark_core.foreign_recipes.as_recipe import recipe_of
from spark_core.foreign_recipes.reading import read_foreign
from spark_core.foreign_recipes.result import Reading

__all__ = ["Account", "Entry", "Reading", "Verdict", "read_foreign", "recipe_of"]
