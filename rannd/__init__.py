"""The inside of RaNNC; users import `pyrannc`. docs/architecture.md says which room does what, and where to begin."""
