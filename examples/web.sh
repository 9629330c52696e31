#!/bin/sh
echo "this is $(hostname)"
