"""The real engine with the real plugins, and no node: what a person sees before any machine is reached."""
