"""detlogp inside other people's training code: one module a framework, imported by its name."""
