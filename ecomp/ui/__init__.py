"""The page of `eschedule ui`: what etcd holds, as a live picture in a browser."""
