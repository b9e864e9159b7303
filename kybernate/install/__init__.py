"""What puts Kybernate on a node: changes of other programs' configuration, shown first, verified, and rolled back."""
