"""What goes wrong while runs go on: who looks for it, by which evidence, and who is told."""
