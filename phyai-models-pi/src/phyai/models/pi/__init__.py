"""What pi0 and pi0.5 share: configuration, host-side processing and network parts."""
