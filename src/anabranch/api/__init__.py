"""The Python interface: runs, volunteers, verification and trained models, as `import anabranch` gives them.

Not here: the command line (`cli`), which calls the same functions, and what they do, which is in the packages
that they call.

Imported by: cli.
"""
