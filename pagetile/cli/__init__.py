"""The command line. Answers go to standard output; progress, figures and errors go to standard error."""
