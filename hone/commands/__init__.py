"""The commands, one module for each group of them. A module here is found automatically: a new
command is a function with `@command` in a file of this folder."""
