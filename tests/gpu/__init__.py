"""What only a GPU shows, in the order in which a person wants to know: the files are numbered, and
the first that fails says what to fix before the next. docs/gpu.md is the page to follow."""
