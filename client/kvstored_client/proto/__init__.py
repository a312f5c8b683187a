"""Generated messages of proto/kvstored/v1. Made by `make proto`; never edited by hand."""
