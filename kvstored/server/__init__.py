"""What the network sees: verbs, gRPC, HTTP. Imports store, never tiers."""
