"""What is known of instances, of computes, and of what placement proposes."""
