"""Ways of carrying steps to the daemon and answers back."""
