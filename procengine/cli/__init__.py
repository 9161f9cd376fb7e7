"""The command line. Owns: one module a command. Never does: import a command that does not run."""
